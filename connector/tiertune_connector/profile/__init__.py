"""GPU seconds by stage and phase: of engines' steps, of any PyTorch module, and what NVML tells of the devices."""

from tiertune_connector.profile.connect import connect, stage
from tiertune_connector.profile.stages import Attached, Profiler, Stage

__all__ = ["Attached", "Profiler", "Stage", "connect", "stage"]
