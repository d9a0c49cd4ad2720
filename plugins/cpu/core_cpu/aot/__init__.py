"""The lowering `inductor` of the processor: AOTInductor makes a shared object of each graph, and a step is one call."""
