"""GPU seconds by stage and phase, of engines' steps and of any PyTorch module, and NVML's figures of the devices."""

from tiertune_connector.profile.connect import connect, stage
from tiertune_connector.profile.stages import Attached, Profiler, Stage

__all__ = ["Attached", "Profiler", "Stage", "connect", "stage"]
