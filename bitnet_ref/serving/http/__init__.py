"""The HTTP server: OpenAI's API over engines. May import `serving` and below; starlette and uvicorn are optional.

`app.py` has the routes, `shapes.py` OpenAI's JSON, `schemas.py` what a request may contain, `shelf.py` the models.
"""
