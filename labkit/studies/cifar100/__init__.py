"""The CIFAR-100 lab: whole trainings with labkit's parts, compared with torch's."""
