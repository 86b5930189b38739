# SPDX-License-Identifier: Apache-2.0
"""A small Hugging Face Hub on 127.0.0.1, for tests that push and pull models with the real `huggingface_hub` client.

    with LoopbackHub(tmp_path) as hub:
        subprocess.run([sys.executable, script], env={**os.environ, **hub.env()}, check=True)
        assert "config.json" in hub.files("tester/model")

The client reads `HF_ENDPOINT` when it is imported, hence the fresh process. Repositories of models and kernels,
which share their names. Every repository is a folder under the root: `repo.json` with its settings, refs and commits,
and `blobs/` named by their etag (the git sha1 of a regular file, the sha256 of an LFS one). One token owns everything.
A client with another token is a signed-in stranger: like one without a token, it reads what is public and writes
nothing.
"""

import base64
import hashlib
import json
import re
import tempfile
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".npz", ".parquet", ".zip", ".gz")
LFS_SIZE = 10 * 1024 * 1024  # the Hub stores larger files with LFS whatever their name is
CHUNK = 1024 * 1024
KIND = "/api/(?:model|kernel)s"
REPO, REV, LFS_OID = r"(?P<repo_id>[^/]+(?:/[^/]+)?)", r"(?P<rev>[^/]+)", r"(?P<oid>[0-9a-f]{64})"
ROUTES = []


def route(pattern):
    """Calls the method for requests whose "METHOD path" is `pattern`, a regular expression."""
    return lambda method: ROUTES.append((re.compile(pattern), method)) or method


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def under(files, path):
    return {name: entry for name, entry in files.items() if name == path or name.startswith(path + "/")}


def file_item(path, entry):
    """A file as the tree listing describes it."""
    item = {"type": "file", "path": path, **entry}
    if len(entry["oid"]) == 64:
        # What git holds is the pointer file, so the oid of the file is the one of its pointer.
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{entry['oid']}\nsize {entry['size']}\n"
        item.update(oid=git_oid(pointer.encode()), lfs={**entry, "pointerSize": len(pointer)})
    return item


def front_matter(card):
    """The YAML metadata at the top of a model card, and what is wrong with it."""
    import yaml  # not in the standard library, but a dependency of huggingface_hub

    block = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        metadata = (yaml.safe_load(block[1]) if block else None) or {}
    except yaml.YAMLError as error:
        return {}, str(error)
    return (metadata, None) if isinstance(metadata, dict) else ({}, "the metadata is not a mapping")


class Refused(Exception):
    """An error for the client, which picks its exception by the code and only then by the status."""

    def __init__(self, status, message, code=None, **headers):
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class LoopbackHub:
    """Serves the repositories under `root`, those of an earlier hub included, from `with` on.

    `requests` lists every request as "METHOD path", without the query. `repos` maps a repo id to its live record:
    `private`, `gated` (False, "auto" or "manual"), `refs` and `commits`; a test may change the first two. `trusted`
    has the organizations whose kernels may run.
    """

    user = "tester"
    token = "hf_loopback"

    def __init__(self, root):
        self.root = Path(root).resolve()
        self.repos, self.requests, self.failures, self.lock = {}, [], [], threading.RLock()
        self.trusted = set()
        for record in self.root.glob("repos/*/*/repo.json"):
            self.repos[f"{record.parts[-3]}/{record.parts[-2]}"] = json.loads(record.read_text())

    def __enter__(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def env(self):
        """The variables that point a fresh process here, on top of `os.environ`."""
        home = self.root / "home"
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),  # where the caller has set them, these two win over HF_HOME
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # With hf-xet installed the client uploads LFS files to xet storage, and asks no server first.
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def fail_next(self, pattern, status, times=1):
        """Answers the next `times` requests in whose "METHOD path" the regular expression is found with `status`.

        The client repeats most requests on 429, 500, 502, 503 and 504, so one such failure may go unnoticed.
        """
        self.failures += [(re.compile(pattern), status)] * times

    def files(self, repo_id, revision="main"):
        entries = self.tree(repo_id, revision)[1]
        return {path: self.blob(repo_id, entry["oid"]).read_bytes() for path, entry in entries.items()}

    def commits(self, repo_id):
        """(oid, message) of the commits on main, the first one first."""
        return [(oid, commit["message"]) for oid, commit in reversed(self.history(repo_id, "main"))]

    def blob(self, repo_id, oid):
        return self.root / "repos" / repo_id / "blobs" / oid

    def tree(self, repo_id, revision):
        """The oid of a commit and its files, path -> {"oid": etag, "size": bytes}."""
        refs, commits = self.repos[repo_id]["refs"], self.repos[repo_id]["commits"]
        names = [prefix + revision for prefix in ("refs/heads/", "refs/tags/", "")]
        oid = next((refs[name] for name in names if name in refs), revision)
        if oid not in commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, commits[oid]["files"]

    def history(self, repo_id, revision):
        """(oid, commit) from the revision back to the first commit."""
        oid, found = self.tree(repo_id, revision)[0], []
        while oid:
            found.append((oid, self.repos[repo_id]["commits"][oid]))
            oid = found[-1][1]["parent"]
        return found

    def add_blob(self, repo_id, content):
        self.blob(repo_id, git_oid(content)).write_bytes(content)
        return {"oid": git_oid(content), "size": len(content)}

    def commit(self, repo_id, ref, parent, files, message):
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        commit = {"parent": parent, "message": message, "date": date, "files": files}
        # The clock makes the oids of two equal commits differ.
        oid = hashlib.sha1(json.dumps([repo_id, time.time_ns(), commit]).encode()).hexdigest()
        self.repos[repo_id]["commits"][oid] = commit
        self.set_ref(repo_id, ref, oid)
        return oid

    def set_ref(self, repo_id, ref, oid):
        self.repos[repo_id]["refs"][ref] = oid
        (self.root / "repos" / repo_id / "repo.json").write_text(json.dumps(self.repos[repo_id], indent=1))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, and Nagle would hold the second one back

    def dispatch(self):
        self.hub, url = self.server.hub, urlsplit(self.path)
        self.query, request = parse_qs(url.query), f"{self.command} {url.path}"
        self.signed_in = "Authorization" in self.headers
        self.owner = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        self.hub.requests.append(request)
        # Bodies go to disk first: whatever the answer is, the connection is then ready for the next request.
        with tempfile.SpooledTemporaryFile(CHUNK, dir=self.hub.root) as self.body:
            self.receive()
            try:
                with self.hub.lock:
                    failure = next((failure for failure in self.hub.failures if failure[0].search(request)), None)
                    if failure:
                        self.hub.failures.remove(failure)
                        raise Refused(failure[1], "The test asked for this failure")
                for pattern, method in ROUTES:
                    if match := pattern.fullmatch(request):
                        return method(self, **{k: v and unquote(v) for k, v in match.groupdict().items()})
                raise Refused(404, f"The loopback hub has no {request}")
            except Refused as error:
                self.reply({"error": error.message}, error.status, error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = dispatch

    def log_message(self, *args):
        pass  # `hub.requests` has them

    def receive(self):
        def read(size):
            while piece := self.rfile.read(min(size, CHUNK)):
                self.body.write(piece)
                size -= len(piece)

        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().strip() or b"0", 16):
                read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            read(int(self.headers.get("Content-Length", 0)))
        self.body.seek(0)

    def start(self, status, headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()

    def reply(self, data, status=200, headers=None):
        content = json.dumps(data, default=str).encode()
        self.start(status, {"Content-Type": "application/json", "Content-Length": len(content), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def flag(self, name):
        return self.query.get(name, [""])[0].lower() == "true"

    def open(self, repo_id, write=False):
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo["private"] and not self.owner):
            raise Refused(404 if self.owner else 401, "Repository not found", "RepoNotFound")
        if write:
            self.check_owner()
        return repo

    def check_owner(self):
        if not self.owner:
            raise Refused(403 if self.signed_in else 401, "This token may not write here")

    @route("GET /api/whoami-v2")
    def whoami(self):
        if not self.owner:
            raise Refused(401, "Invalid credentials in Authorization header")
        self.reply({"type": "user", "name": self.hub.user, "orgs": []})

    @route("POST /api/validate-yaml")
    def validate_yaml(self):
        metadata, error = front_matter(json.load(self.body)["content"])
        warnings = [] if metadata or error else [{"message": "empty or missing yaml metadata in repo card"}]
        self.reply({"errors": [{"message": error}] if error else [], "warnings": warnings}, 400 if error else 200)

    @route("POST /api/repos/create")
    def create(self):
        self.check_owner()
        wanted = json.load(self.body)
        repo_id = f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        if wanted.get("type", "model") not in ("model", "kernel") or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id):
            raise Refused(400, f"Not the name of a model or a kernel: {repo_id}")
        answer = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        # The field was called `private` before it was called `visibility`.
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        with self.hub.lock:
            if repo_id in self.hub.repos:  # the client takes the URL from this answer too
                return self.reply({"error": "You already created this model repo", **answer}, 409)
            self.hub.repos[repo_id] = {"private": private, "gated": False, "refs": {}, "commits": {}}
            self.hub.blob(repo_id, "").mkdir(parents=True)
            # The Hub starts a repository with this file, so that there is a commit from the start.
            attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
            files = {".gitattributes": self.hub.add_blob(repo_id, attributes.encode())}
            self.hub.commit(repo_id, "refs/heads/main", None, files, "initial commit")
        self.reply(answer)

    @route(f"POST {KIND}/{REPO}/(?P<kind>branch|tag)/{REV}")
    def create_ref(self, repo_id, kind, rev):
        refs, wanted = self.open(repo_id, write=True)["refs"], json.load(self.body)
        # A new branch is named in the path and a new tag in the body; the other one says where it starts.
        ref, start = f"refs/heads/{rev}", wanted.get("startingPoint", "main")
        if kind == "tag":
            ref, start = f"refs/tags/{wanted['tag']}", rev
        with self.hub.lock:
            if ref in refs:
                raise Refused(409, f"Reference already exists: {ref}")
            self.hub.set_ref(repo_id, ref, self.hub.tree(repo_id, start)[0])
        self.reply({})

    @route(f"GET {KIND}/{REPO}(?:/revision/{REV})?")
    def info(self, repo_id, rev):
        repo = self.open(repo_id)
        history, files = self.hub.history(repo_id, rev or "main"), self.hub.tree(repo_id, rev or "main")[1]
        siblings = [{"rfilename": path} for path in sorted(files)]
        for sibling in siblings if self.flag("blobs") else ():
            item = file_item(sibling["rfilename"], files[sibling["rfilename"]])
            sibling.update(size=item["size"], blobId=item["oid"])
            if "lfs" in item:
                sibling["lfs"] = {**item["lfs"], "sha256": item["lfs"]["oid"]}
        readme = self.hub.blob(repo_id, files["README.md"]["oid"]).read_bytes() if "README.md" in files else b""
        card = front_matter(readme.decode())[0]
        ids = {"id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0], "sha": history[0][0]}
        times = {"createdAt": history[-1][1]["date"], "lastModified": history[0][1]["date"]}
        about = {"private": repo["private"], "gated": repo["gated"], "disabled": False, "downloads": 0, "likes": 0}
        fields = {"tags": card.get("tags", []), **{key: card.get(key) for key in ("library_name", "pipeline_tag")}}
        self.reply({**ids, **times, **about, **fields, "cardData": card, "siblings": siblings, "spaces": []})

    @route(f"GET {KIND}/{REPO}/refs")
    def list_refs(self, repo_id):
        refs = self.open(repo_id)["refs"].items()
        kinds = {"branches": "refs/heads/", "tags": "refs/tags/"}
        self.reply(
            {
                kind: [
                    {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid}
                    for ref, oid in refs
                    if ref.startswith(prefix)
                ]
                for kind, prefix in kinds.items()
            }
            | {"converts": []}
        )

    @route("GET /api/organizations/(?P<name>[^/]+)/overview")
    def organization(self, name):
        """Of an organization whose kernels may run, if it is in `trusted`. No other has an overview."""
        if name not in self.hub.trusted:
            raise Refused(404, f"There is no organization {name}")
        self.reply({"name": name, "fullname": name, "trustedKernelPublisher": True})

    @route(f"GET {KIND}/{REPO}/tree/{REV}(?:/(?P<folder>.+))?")
    def list_tree(self, repo_id, rev, folder):
        self.open(repo_id)
        files, base = self.hub.tree(repo_id, rev)[1], f"{folder}/" if folder else ""
        items = {path: file_item(path, entry) for path, entry in files.items()}
        for path in {name[: slash.start()] for name in files for slash in re.finditer("/", name)}:
            oid = hashlib.sha1(json.dumps(under(files, path), sort_keys=True).encode()).hexdigest()
            items[path] = {"type": "directory", "path": path, "oid": oid, "size": 0}
        inside = sorted(path for path in items if path.startswith(base))
        if folder and not inside:
            raise Refused(404, f"{folder} does not exist on {rev}", "EntryNotFound")
        inside = [path for path in inside if self.flag("recursive") or "/" not in path[len(base) :]]
        for path in inside if self.flag("expand") else ():
            for oid, commit in self.hub.history(repo_id, rev):  # back to the commit that last changed the path
                if under(commit["files"], path) != under(files, path):
                    break
                items[path]["lastCommit"] = {"id": oid, "title": commit["message"], "date": commit["date"]}
        self.reply([items[path] for path in inside])

    @route(f"POST {KIND}/{REPO}/preupload/{REV}")
    def preupload(self, repo_id, rev):
        self.open(repo_id, write=True)
        there, answers = self.hub.tree(repo_id, rev)[1], []
        for file in json.load(self.body)["files"]:
            binary = file["path"].endswith(LFS_SUFFIXES) or b"\0" in base64.b64decode(file["sample"])
            mode = "lfs" if binary or file["size"] >= LFS_SIZE else "regular"
            oid = there.get(file["path"], {}).get("oid")  # it tells the client which files are unchanged
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply({"files": answers})

    @route(rf"POST /{REPO}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo_id):
        self.open(repo_id, write=True)
        verify = {"href": f"{self.hub.endpoint}/{repo_id}.git/info/lfs/objects/verify"}
        objects = json.load(self.body)["objects"]
        for item in objects:
            if not self.hub.blob(repo_id, item["oid"]).exists():  # without actions nothing is uploaded
                upload = {"href": f"{self.hub.endpoint}/lfs/{repo_id}/{item['oid']}"}
                item["actions"] = {"upload": upload, "verify": verify}
        self.reply({"transfer": "basic", "objects": objects})

    @route(f"PUT /lfs/{REPO}/{LFS_OID}")
    def lfs_upload(self, repo_id, oid):
        # No look at the token: the Hub gives out a signed URL, and the client sends no token to it.
        sha256, target = hashlib.sha256(), self.hub.blob(repo_id, oid)
        with tempfile.NamedTemporaryFile(dir=self.hub.root, delete=False) as file:
            while piece := self.body.read(CHUNK):
                sha256.update(piece)
                file.write(piece)
        if sha256.hexdigest() != oid or repo_id not in self.hub.repos:
            Path(file.name).unlink()
            raise Refused(400, f"The content is not the one of {oid}")
        Path(file.name).replace(target)
        self.reply({})

    @route(rf"POST /{REPO}\.git/info/lfs/objects/verify")
    def lfs_verify(self, repo_id):
        self.open(repo_id, write=True)
        wanted = json.load(self.body)
        blob = self.hub.blob(repo_id, wanted["oid"])
        if not blob.exists() or blob.stat().st_size != wanted["size"]:
            raise Refused(404, "The object was not uploaded")
        self.reply({})

    @route(f"POST {KIND}/{REPO}/commit/{REV}")
    def commit(self, repo_id, rev):
        refs, ref = self.open(repo_id, write=True)["refs"], rev if rev.startswith("refs/") else f"refs/heads/{rev}"
        with self.hub.lock:
            parent, files = self.hub.tree(repo_id, ref)
            files = dict(files)
            for line in self.body:  # one operation a line, so that memory holds one regular file at most
                key, value = json.loads(line).values()
                path = value.get("path", "").rstrip("/")
                if key == "header":
                    message = value["summary"]
                    if value.get("parentCommit", parent) != parent:
                        raise Refused(412, "A commit has happened since. Please refresh and try again.")
                elif key == "file":
                    files[path] = self.hub.add_blob(repo_id, base64.b64decode(value["content"]))
                elif key == "lfsFile":
                    blob = self.hub.blob(repo_id, value["oid"])
                    if not blob.exists():
                        raise Refused(400, f"The LFS object of {path} was not uploaded")
                    files[path] = {"oid": value["oid"], "size": blob.stat().st_size}
                else:  # deletedFile or deletedFolder
                    gone = {path} & set(files) if key == "deletedFile" else set(under(files, path)) - {path}
                    if not gone:
                        raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                    files = {path: entry for path, entry in files.items() if path not in gone}
            number = 1 + sum(name.startswith("refs/pr/") for name in refs)
            pull_request = "create_pr" in self.query
            oid = self.hub.commit(repo_id, f"refs/pr/{number}" if pull_request else ref, parent, files, message)
        url = f"{self.hub.endpoint}/{repo_id}"
        answer = {"success": True, "commitUrl": f"{url}/commit/{oid}", "commitOid": oid}
        self.reply({**answer, "pullRequestUrl": f"{url}/discussions/{number}" if pull_request else None})

    @route(f"(?:GET|HEAD) (?:/kernels)?/{REPO}/resolve/{REV}/(?P<path>.+)")
    def resolve(self, repo_id, rev, path):
        if self.open(repo_id)["gated"] and not self.owner:  # everybody sees the file list of a gated repository
            raise Refused(403 if self.signed_in else 401, f"Access to model {repo_id} is restricted", "GatedRepo")
        commit, files = self.hub.tree(repo_id, rev)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path not in files:  # the commit goes along: the client remembers that it has no such file
            raise Refused(404, "Entry not found", "EntryNotFound", **headers)
        oid, size = files[path]["oid"], files[path]["size"]
        first, end, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, end = int(wanted[1]), min(int(wanted[2] or size) + 1, size)
            if first >= end:
                raise Refused(416, "Range not satisfiable", **{"Content-Range": f"bytes */{size}"})
            status, headers["Content-Range"] = 206, f"bytes {first}-{end - 1}/{size}"
        headers.update({"ETag": f'"{oid}"', "Content-Length": end - first})
        if len(oid) == 64:
            headers.update({"X-Linked-Size": size, "X-Linked-Etag": f'"{oid}"'})
        self.start(status, headers)
        if self.command == "GET":
            with self.hub.blob(repo_id, oid).open("rb") as file:
                file.seek(first)
                while first < end:
                    first += self.wfile.write(file.read(min(CHUNK, end - first)))
