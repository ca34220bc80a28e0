"""Why engine and trainer disagree: one possible cause after the other is put into the trainer's arithmetic."""
