import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world, function, *args)`: see `tests/support/ranks.py`."""
    pool = Ranks()
    yield pool
    pool.close()
