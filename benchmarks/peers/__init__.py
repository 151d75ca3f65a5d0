"""dagresume beside other durable engines, each in an environment of its own."""
