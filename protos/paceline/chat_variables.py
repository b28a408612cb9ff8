"""Names in chat templates. Apart from `chat_template`, as who checks a request needs no jinja2."""

OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "strftime_now", "add_generation_prompt", "continue_final_message")
)
"""What `ChatTemplate.render` knows itself: no argument of a caller's own is called so."""
