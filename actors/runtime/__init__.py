"""What all processes need of their surroundings: Ray, Java, nodes, signals, secrets, memory."""
