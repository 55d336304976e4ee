"""Predictions as formulas: what an operation should cost before anybody measures it. Numbers in, numbers out.

``communication``  all-reduce, by the alpha-beta model
``attention``      FLOPs and bytes of softmax attention
``transformer``    parameters, FLOPs and bytes of the Transformer
``memory``         what a training step of the Transformer holds in memory, tensor by tensor
"""
