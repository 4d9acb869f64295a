"""Keeps the repository root off `sys.path`: a folder named `kernels` there would shadow a package of that name."""

import os
import sys

_ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.getcwd()) != _ROOT]
