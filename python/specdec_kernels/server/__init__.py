"""The HTTP server: OpenAI's endpoints over one engine, metrics, and a page that shows what speculation does."""

from .app import make_app
from .process import serving_process
from .protocol import Settings

__all__ = ["Settings", "make_app", "serving_process"]
