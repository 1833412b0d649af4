"""The step of one generation batch: decisions from columns, before anything moves, and the batch made of them."""
