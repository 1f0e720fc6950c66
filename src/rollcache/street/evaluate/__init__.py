"""How good the embedded world is: against the renderer, over the horizon, on scenes it was never trained on."""
