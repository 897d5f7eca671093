# Sourced by .ci/run: a container engine that answers, Compose, and what `make test-compose` needs
# to build images here. On a Debian machine as root it installs and starts what is missing; the
# engine it starts goes on running. Where the public base image or PyTorch's index are out of reach,
# the base image is made from this machine's Debian mirror and PyTorch comes from wherever this
# machine's pip finds it. Sets BASE_IMAGE, BUILD_NETWORK and pip's variables.

fail() {
  echo ".ci/run: $*" >&2
  exit 1
}

engine_answers() {
  docker info > /dev/null 2>&1
}

install_packages() {
  [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || fail "needs root and apt-get to install: $*"
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install --yes "$@"
}

start_engine() {
  command -v dockerd > /dev/null || install_packages docker.io
  [ "$(id -u)" = 0 ] || fail "no container engine answers; start one (starting it here needs root)"
  local log=/var/log/foretoken-dockerd.log
  setsid nohup dockerd > "$log" 2>&1 < /dev/null &
  local engine=$!
  for _ in $(seq 120); do
    if engine_answers; then return; fi
    kill -0 "$engine" 2> /dev/null || break
    sleep 0.5
  done
  tail -n 20 "$log" >&2
  fail "dockerd does not answer; its log is $log"
}

# An image of this machine's own Debian release, with the certificates that this machine trusts.
make_base_image() {
  local image=$1 codename mirror folder
  command -v debootstrap > /dev/null || install_packages debootstrap
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $codename" | head -n 1)
  [ -n "$mirror" ] || fail "apt's sources name no mirror of $codename"
  folder=$(mktemp -d)
  debootstrap --variant=minbase --include=ca-certificates "$codename" "$folder" "$mirror" > "$folder.log" 2>&1 \
    || { tail -n 20 "$folder.log" >&2; fail "debootstrap failed"; }
  if [ -d /usr/local/share/ca-certificates ]; then
    cp -r /usr/local/share/ca-certificates/. "$folder/usr/local/share/ca-certificates/"
    chroot "$folder" update-ca-certificates > /dev/null
  fi
  rm -rf "$folder"/var/cache/apt/archives/*.deb
  tar -C "$folder" -c . \
    | docker import --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' - "$image" > /dev/null
  rm -rf "$folder" "$folder.log"
}

# Without PyTorch's own index: the wheel that this machine's pip finds, for the Python
# that the base image has or gets.
fetch_torch() {
  local python=$1 index version
  index=$(sed -n 's/^TORCH_INDEX ?= //p' Makefile)
  if "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$index/torch/" 2> /dev/null; then
    return
  fi
  version=$(docker run --rm "$BASE_IMAGE" sh -c 'python3 --version 2> /dev/null || apt-cache show python3' \
    | sed -n 's/^\(Python\|Version:\) \([0-9]*\.[0-9]*\).*/\2/p' | head -n 1)
  [ -n "$version" ] || fail "cannot tell which Python $BASE_IMAGE has"
  "$python" -m pip download --no-deps --only-binary :all: --python-version "$version" --constraint constraints.txt \
    --dest docker/wheels torch
}

# pip's indexes of this machine, for pip in a build; folders of this machine are not there.
export_pip_settings() {
  local python=$1 key variable value
  for key in index-url extra-index-url trusted-host; do
    variable=PIP_$(echo "$key" | tr 'a-z-' 'A-Z_')
    value=$("$python" -m pip config get "global.$key" 2> /dev/null || true)
    value=$(echo "${!variable:-$value}" | tr ' ' '\n' | grep -v '^file:' | paste -s -d ' ' || true)
    if [ -n "$value" ]; then export "$variable=$value"; else unset "$variable"; fi
  done
}

# The argument: a Python that has pip.
set_up_containers() {
  command -v docker > /dev/null || install_packages docker.io
  engine_answers || start_engine
  docker compose version > /dev/null 2>&1 || command -v docker-compose > /dev/null || install_packages docker-compose
  if [ -z "${BASE_IMAGE:-}" ]; then
    BASE_IMAGE=$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)
    if ! docker image inspect "$BASE_IMAGE" > /dev/null 2>&1 && ! docker pull --quiet "$BASE_IMAGE" 2> /dev/null; then
      BASE_IMAGE=foretoken-ci-base
      docker image inspect "$BASE_IMAGE" > /dev/null 2>&1 || make_base_image "$BASE_IMAGE"
    fi
  fi
  export BASE_IMAGE BUILD_NETWORK=host
  export_pip_settings "$1"
  fetch_torch "$1"
}
