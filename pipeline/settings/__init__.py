"""What a person may set: the settings of a run, and the values that they are made of."""
