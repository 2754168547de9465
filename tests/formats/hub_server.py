"""A hub of our own on this machine: as much of the Hugging Face hub's HTTP as its client needs to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LFS = (".safetensors", ".gguf", ".bin")


def git_blob_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """repos: "org/repo" -> {revision: (commit, {file name: bytes})}. A commit is a revision too."""

    def __init__(self):
        self.repos = {}
        self.sent = []  # the files whose content was asked for
        self.corrupt = set()  # files that arrive otherwise than listed
        self.says = {}  # key of a listed file -> the value that it says
        self.etag = None  # of each file; by default its SHA-256
        self.linked_etag = None  # of each file, if the hub gives one
        self.refusal = None  # (code, X-Error-Code, X-Error-Message) of every answer
        self.gates = {}  # file -> an Event to wait for before sending

    def put(self, repo, revision, files):
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        for name in (revision, commit):
            self.repos.setdefault(repo, {})[name] = (commit, dict(files))
        return commit


@contextmanager
def serving(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def reply(self, code, body=b"", **headers):
            self.send_response(code)
            for key, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path, _, query = self.path.partition("?")
            path = unquote(path).strip("/").split("/")
            if hub.refusal is not None:
                code, name, message = hub.refusal
                return self.reply(code, X_Error_Code=name, X_Error_Message=message)
            listing = path[:2] == ["api", "models"]
            org, repo, *rest = path[2:] if listing else path
            found = hub.repos.get(f"{org}/{repo}")
            if found is None:
                return self.reply(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            is_tree = listing and rest[:1] == ["tree"]
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in found:
                return self.reply(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            commit, files = found[revision]
            if is_tree:
                return self.reply(200, self.tree(files), Content_Type="application/json")
            if listing:
                siblings = self.siblings(files) if "blobs=true" in query.lower() else [{"rfilename": n} for n in files]
                listed = {"id": f"{org}/{repo}", "modelId": f"{org}/{repo}", "sha": commit, "siblings": siblings}
                return self.reply(200, json.dumps(listed).encode(), Content_Type="application/json")
            return self.file("/".join(rest[2:]), commit, files)

        def siblings(self, files):
            """With the sizes and hashes, which the hub gives when it is asked for them."""
            siblings = []
            for name, data in files.items():
                entry = {"rfilename": name, "size": len(data), "blobId": git_blob_id(data)}
                if name.endswith(LFS):
                    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                siblings.append(entry | hub.says)
            return siblings

        def tree(self, files):
            entries = []
            for name, data in files.items():
                entry = {"type": "file", "path": name, "size": len(data), "oid": git_blob_id(data)}
                if name.endswith(LFS):
                    entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                entries.append(entry)
            return json.dumps(entries).encode()

        def file(self, name, commit, files):
            if name not in files:
                return self.reply(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            data = files[name]
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest() if hub.etag is None else hub.etag}"',
                "X_Repo_Commit": commit,
                "Accept_Ranges": "bytes",
            }
            if hub.linked_etag is not None:
                headers["X_Linked_Etag"] = hub.linked_etag
            if self.command == "HEAD":
                return self.reply(200, data, **headers)
            if name in hub.gates:
                hub.gates[name].wait(30)
            first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            hub.sent.append((name, first))
            if name in hub.corrupt:
                data = data[:-1] + bytes([data[-1] ^ 1])
            body = data[first:]
            if first:
                headers["Content_Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            return self.reply(206 if first else 200, body, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
