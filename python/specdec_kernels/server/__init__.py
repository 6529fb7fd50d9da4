"""The HTTP server: OpenAI's endpoints over one engine, metrics, and a page that compares with and without drafts."""

from .app import make_app
from .connections import Connection
from .process import serving_process
from .protocol import Settings

__all__ = ["Connection", "Settings", "make_app", "serving_process"]
