"""How a pipeline is executed: one module per runner."""
