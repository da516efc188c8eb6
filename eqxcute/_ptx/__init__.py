"""Runs compiled CuTe kernels on a CPU, with every access checked."""

from ._fault import KernelFault as KernelFault
from ._host import execute as execute
from ._run import run_ptx as run_ptx
