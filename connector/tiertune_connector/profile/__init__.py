"""GPU seconds by stage, of engines' steps (also by phase) and of any PyTorch module, and NVML's figures of devices."""

from tiertune_connector.profile.stages import Attached, Profiler, Stage, connect, stage

__all__ = ["Attached", "Profiler", "Stage", "connect", "stage"]
