"""A local Hugging Face Hub with enough of the protocol to list, download, create and commit."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """Repositories by name, each with revisions, each with files."""

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_HEAD(self):
                hub.get(self, body=False)

            def do_GET(self):
                hub.get(self, body=True)

            def do_POST(self):
                hub.post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.repos.setdefault(repo, {})[revision] = files

    @staticmethod
    def commit(files: dict[str, bytes]) -> str:
        return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(files.items()))).hexdigest()

    def find(self, repo: str, revision: str) -> dict[str, bytes] | None:
        revisions = self.repos.get(repo, {})
        if revision in revisions:
            return revisions[revision]
        return next((files for files in revisions.values() if self.commit(files) == revision), None)

    @staticmethod
    def send(handler, status: int, data: bytes = b"", body: bool = True, **headers: str) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def missing(self, handler, code: str, body: bool = True) -> None:
        self.send(handler, 404, b"{}", body, X_Error_Code=code, X_Error_Message=code)

    def get(self, handler, body: bool) -> None:
        path = unquote(urlparse(handler.path).path).strip("/")
        self.asked.append(f"{handler.command} {path}")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            repo, revision = (
                "/".join(parts[2:4]),
                parts[5] if len(parts) > 5 and parts[4] in ("revision", "tree") else "main",
            )
            if repo not in self.repos:
                return self.missing(handler, "RepoNotFound", body)
            files = self.find(repo, revision)
            if files is None:
                return self.missing(handler, "RevisionNotFound", body)
            if len(parts) > 4 and parts[4] == "tree":
                found = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()
                ]
            else:
                found = {
                    "id": repo,
                    "modelId": repo,
                    "sha": self.commit(files),
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                }
                found |= {"siblings": [{"rfilename": name} for name in files]}
            return self.send(handler, 200, json.dumps(found).encode(), body, Content_Type="application/json")
        if "resolve" in parts:
            at = parts.index("resolve")
            repo, revision, name = "/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :])
            files = self.find(repo, revision)
            if files is None or name not in files:
                return self.missing(handler, "RepoNotFound" if repo not in self.repos else "EntryNotFound", body)
            data = files[name]
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            return self.send(
                handler, 200, data, body, ETag=tag, X_Repo_Commit=self.commit(files), Accept_Ranges="bytes"
            )
        return self.missing(handler, "RepoNotFound", body)

    def post(self, handler) -> None:
        path = unquote(urlparse(handler.path).path).strip("/")
        data = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.asked.append(f"POST {path}")
        if path == "api/validate-yaml":
            return self.answer(handler, {"errors": [], "warnings": []})
        if path == "api/repos/create":
            asked = json.loads(data)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
            self.repos.setdefault(repo, {}).setdefault("main", {})
            return self.answer(handler, {"url": f"{self.url}/{repo}", "name": repo, "id": repo})
        parts = path.split("/")
        repo = "/".join(parts[2:4])
        if "preupload" in parts:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(data)["files"]
            ]
            return self.answer(handler, {"files": files})
        if "commit" in parts:
            files = dict(self.repos[repo].get("main", {}))
            for line in data.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.repos[repo]["main"] = files
            commit = self.commit(files)
            return self.answer(
                handler, {"commitUrl": f"{self.url}/{repo}/commit/{commit}", "commitOid": commit, "success": True}
            )
        return self.missing(handler, "RepoNotFound")

    def answer(self, handler, data) -> None:
        self.send(handler, 200, json.dumps(data).encode(), Content_Type="application/json")
