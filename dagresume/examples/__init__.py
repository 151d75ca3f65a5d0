"""Programs to read and to run; nothing in dagresume imports them. They need `pip install dagresume[demo]`."""
