"""The embedded driving world: seven cameras, action-conditioned, trained from scratch with this package."""
