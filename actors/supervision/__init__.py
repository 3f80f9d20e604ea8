"""What keeps a run going: one supervisor for each slot, its epochs, and its hold on the Spark driver."""
