"""The HTTP server: OpenAI's endpoints over one engine, metrics, and a page that shows what speculation does."""

from .app import make_app
from .asked import Settings
from .process import serving_process

__all__ = ["Settings", "make_app", "serving_process"]
