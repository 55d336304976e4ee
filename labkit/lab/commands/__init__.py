"""What the command line does beside the labs: looks at the machine, carries out notebooks, says how far it is."""
