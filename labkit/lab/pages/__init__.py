"""Pages that people read: notebooks executed and exported, cards, and the index of a report."""
