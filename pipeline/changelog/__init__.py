"""Tables as they are, or were at any commit: a view of the change log that the Delta sink appends to."""
