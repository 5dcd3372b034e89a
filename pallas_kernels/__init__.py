"""GPU kernels for DeepSeek sparse attention, each with a plain JAX reference. Pure functions on arrays."""
