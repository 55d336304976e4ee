"""Several hosts on one machine: network namespaces, each with a name and an address of its own,
joined by links."""
