"""What authors of plugins test their own code with."""
