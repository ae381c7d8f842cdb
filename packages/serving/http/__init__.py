"""The HTTP surface: OpenAI's endpoints, drafters, health, metrics. Knows FastAPI; everything else is handed to it."""
