"""eqxcute: CuTe DSL kernels as Equinox modules."""
