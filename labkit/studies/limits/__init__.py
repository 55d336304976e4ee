"""The limits lab: what this machine can do at best, and which limit binds what."""
