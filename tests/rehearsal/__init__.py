"""Rehearsals of machines that are not here: GPUs, too little memory, a compiler that is missing."""
