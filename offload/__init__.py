"""Models larger than memory: shards rest at home and stream to the compute device ahead of use."""

from offload.model import OffloadModel
from offload.plan import Plan
from offload.statistics import Statistics
from offload.tape import Tape

__all__ = ["OffloadModel", "Plan", "Statistics", "Tape"]
