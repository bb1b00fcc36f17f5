"""Pictures and pages of what commands found."""
