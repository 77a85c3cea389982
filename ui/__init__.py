"""The web page: Gradio tabs, the streaming player, and the few routes between them. Speaks to `engine` and `eval`."""
