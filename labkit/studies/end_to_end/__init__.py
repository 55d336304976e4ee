"""The end-to-end lab: what a training step of the Transformer costs, part by part, predicted and measured."""
