"""What replay can do without: files, asynchronous trainers, Unsloth, advice and reports."""
