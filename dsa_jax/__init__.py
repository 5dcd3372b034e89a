"""DeepSeek V4.1 in JAX: models, caches, weights, decode loop, command line."""
