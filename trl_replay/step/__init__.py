"""What one generation batch goes through: what is decided from columns, before anything moves."""
