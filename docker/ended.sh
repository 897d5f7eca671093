#!/bin/sh
# Says for each container of a Compose project how it last ended, and what to type: killed from
# outside, or died by itself. An argument: the project's name. Needs docker alone.
set -eu
project=${1:-${COMPOSE_PROJECT_NAME:-foretoken}}

# The init process of a container (TINI_VERBOSITY in compose.yaml) logs how its child ended. A
# container that was killed from outside loses both at once, and logs nothing.
last_words() {
  docker logs "$@" 2>&1 | sed -n 's/^\[INFO  tini ([0-9]*)\] Main child exited [a-z ]*(with \(.*\))$/\1/p' | tail -n 1
}

advice() {
  case $1 in
    "status '0'") echo "it was asked to stop" ;;
    "status '2'") echo "it refused its settings: docker compose logs $2" ;;
    "status '80'" | "status '81'") echo "it lost its GPU context: docs/gpu-faults.md" ;;
    "status '"*) echo "its log says why: docker compose logs $2" ;;
    *) echo "a crash, or a kill in the container or by the kernel: docker compose logs $2, and the host's dmesg" ;;
  esac
}

containers=$(docker ps --all --quiet --filter "label=com.docker.compose.project=$project")
[ -n "$containers" ] || { echo "no containers of the project $project; name another: $0 PROJECT" >&2; exit 1; }
for container in $containers; do
  docker inspect --format '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Status}} {{.State.ExitCode}}
{{- ""}} {{.State.OOMKilled}} {{.RestartCount}} {{.State.StartedAt}}' "$container"
done | sort | while read -r service status code oom restarts started; do
  container=$(docker ps --all --quiet --filter "label=com.docker.compose.project=$project" \
    --filter "label=com.docker.compose.service=$service")
  if [ "$status" = exited ]; then
    ended=$(last_words --since "$started" "$container")
    if [ -n "$ended" ]; then
      echo "$service: ended with $ended; $(advice "$ended" "$service"); start it: docker compose up -d"
    else
      echo "$service: killed from outside (exit code $code); nobody starts it again: docker compose up -d"
    fi
  elif [ "$restarts" -gt 0 ] || [ "$status" = restarting ]; then
    ended=$(last_words "$container")
    if [ "$oom" = true ]; then
      echo "$service: $status, restarted $restarts times; out of the container's memory (mem_limit in compose.yaml)"
    elif [ -n "$ended" ]; then
      echo "$service: $status, restarted $restarts times; ended with $ended; $(advice "$ended" "$service")"
    else
      echo "$service: $status, restarted $restarts times; its init was killed by a process of the host"
    fi
  else
    echo "$service: $status, has not ended"
  fi
done
