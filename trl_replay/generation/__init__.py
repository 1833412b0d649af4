"""Before and between the trainer's scorings: what is generated for, and what is generated again."""
