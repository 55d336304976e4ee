"""The gradient-buckets lab: how long a data-parallel step waits for its gradients, and whether their size matters."""
