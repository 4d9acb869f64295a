"""fsdp_fx: a compiler from an ordinary PyTorch training step to a fully sharded one."""

from fsdp_fx.api import CompiledStep as CompiledStep
from fsdp_fx.api import fsdp_compile as fsdp_compile
from fsdp_fx.errors import CaptureError as CaptureError
from fsdp_fx.errors import CollectiveError as CollectiveError
from fsdp_fx.errors import ConfigError as ConfigError
from fsdp_fx.errors import FsdpFxError as FsdpFxError
from fsdp_fx.errors import PlanMismatchError as PlanMismatchError
from fsdp_fx.errors import StateError as StateError
from fsdp_fx.errors import VerifyError as VerifyError
from fsdp_fx.graph_pass import GraphPass as GraphPass
from fsdp_fx.graph_pass import graph_pass as graph_pass
from fsdp_fx.pipeline import PASSES as PASSES
from fsdp_fx.pipeline import Pipeline as Pipeline
from fsdp_fx.report import Report as Report
from fsdp_fx.signature import StepSignature as StepSignature
from fsdp_fx.step_graph import StepGraph as StepGraph
from fsdp_fx.world import simulated_world as simulated_world

__version__ = "0.1.0"
