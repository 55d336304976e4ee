"""Pages that people read: cards, exported labs, the index of a report, comparisons of machines."""
