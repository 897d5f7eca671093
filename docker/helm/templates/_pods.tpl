{{- define "foretoken.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "foretoken.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Flags and mounts of the secrets by which services know each other. */}}
{{- define "foretoken.linkArgs" -}}
{{- with .Values.links }}
{{- if .tokenSecret }}
- --link-token-file=/etc/foretoken/link-token/token
{{- end }}
{{- if .certificateSecret }}
{{ include "foretoken.certificateArgs" $ }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "foretoken.certificateArgs" -}}
- --link-certfile=/etc/foretoken/link-certificate/tls.crt
- --link-keyfile=/etc/foretoken/link-certificate/tls.key
- --link-ca=/etc/foretoken/link-certificate/ca.crt
{{- end -}}

{{- define "foretoken.linkMounts" -}}
{{- with .Values.links }}
{{- if .tokenSecret }}
- {name: link-token, mountPath: /etc/foretoken/link-token, readOnly: true}
{{- end }}
{{- if .certificateSecret }}
- {name: link-certificate, mountPath: /etc/foretoken/link-certificate, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "foretoken.linkVolumes" -}}
{{- with .Values.links }}
{{- if .tokenSecret }}
- name: link-token
  secret: {secretName: {{ .tokenSecret }}, defaultMode: 0440}
{{- end }}
{{- if .certificateSecret }}
- name: link-certificate
  secret: {secretName: {{ .certificateSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{- define "foretoken.accessVolumes" -}}
{{- with .Values.access }}
{{- if .keysSecret }}
- name: api-keys
  secret: {secretName: {{ .keysSecret }}, defaultMode: 0440}
{{- end }}
{{- if .adminKeySecret }}
- name: admin-key
  secret: {secretName: {{ .adminKeySecret }}, defaultMode: 0440}
{{- end }}
{{- if .tlsSecret }}
- name: tls
  secret: {secretName: {{ .tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{- define "foretoken.modelVolume" -}}
- name: model
{{ toYaml .Values.model.volume | indent 2 }}
{{- end -}}

{{- define "foretoken.modelPath" -}}
{{ printf "/model/%s" .Values.model.path | trimSuffix "/" }}
{{- end -}}

{{/* The container of a gateway; `verifier`: where its verifiers are. */}}
{{- define "foretoken.gatewayContainer" -}}
{{- $v := .root.Values -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne $v.access.tlsSecret "") -}}
- name: gateway
  {{- include "foretoken.image" (dict "image" $v.images.gateway "root" .root) | nindent 2 }}
  args:
    - gateway
    - {{ include "foretoken.modelPath" .root }}
    - --served-model-name={{ $v.model.name }}
    - --verifier={{ .verifier }}
    - --host=0.0.0.0
    - --port=8000
    - --grpc-port=50051
    - --drain-timeout={{ $v.drain.seconds }}
    {{- with $v.access }}
    {{- if .keysSecret }}
    - --api-key-file=/etc/foretoken/api-keys/keys.toml
    {{- end }}
    {{- if .adminKeySecret }}
    - --admin-api-key-file=/etc/foretoken/admin-key/key
    {{- end }}
    {{- if .tlsSecret }}
    - --ssl-certfile=/etc/foretoken/tls/tls.crt
    - --ssl-keyfile=/etc/foretoken/tls/tls.key
    {{- end }}
    {{- if .clientCertificates }}
    - --ssl-ca-certs=/etc/foretoken/tls/ca.crt
    {{- end }}
    {{- if .insecure }}
    - --insecure
    {{- end }}
    {{- end }}
    {{- if eq $v.routing "gateways" }}
    {{- include "foretoken.linkArgs" .root | nindent 4 }}
    {{- end }}
    {{- with $v.gateway.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 50051}
  # Asks by HTTP where TLS is, since Kubernetes' gRPC probe speaks none. The Host
  # is one that is always allowed.
  {{- if $v.access.tlsSecret }}
  startupProbe:
    httpGet: &health {path: /health, port: http, scheme: HTTPS, httpHeaders: [{name: Host, value: localhost}]}
    periodSeconds: 5
    failureThreshold: 60
  livenessProbe:
    httpGet: *health
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /ready, port: http, scheme: HTTPS, httpHeaders: [{name: Host, value: localhost}]}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- else }}
  startupProbe:
    grpc: {port: 50051}
    periodSeconds: 5
    failureThreshold: 60
  livenessProbe:
    grpc: {port: 50051}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    grpc: {port: 50051, service: foretoken.gateway.v1.GatewayService}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- end }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $v.drain.endpointsSeconds }}}
  resources:
    {{- toYaml $v.gateway.resources | nindent 4 }}
  {{- include "foretoken.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- with $v.access }}
    {{- if .keysSecret }}
    - {name: api-keys, mountPath: /etc/foretoken/api-keys, readOnly: true}
    {{- end }}
    {{- if .adminKeySecret }}
    - {name: admin-key, mountPath: /etc/foretoken/admin-key, readOnly: true}
    {{- end }}
    {{- if .tlsSecret }}
    - {name: tls, mountPath: /etc/foretoken/tls, readOnly: true}
    {{- end }}
    {{- end }}
    {{- if eq $v.routing "gateways" }}
    {{- include "foretoken.linkMounts" .root | nindent 4 }}
    {{- else }}
    - {name: sockets, mountPath: /run/foretoken}
    {{- end }}
{{- end -}}

{{/* The environment and mounts of every container that uses the GPU. */}}
{{- define "foretoken.mpsEnvironment" -}}
env:
  - {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/mps/pipe}
  - {name: CUDA_MPS_LOG_DIRECTORY, value: /run/mps/log}
{{- end -}}

{{- define "foretoken.mpsMounts" -}}
- {name: mps, mountPath: /run/mps}
- {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* The verifier's container. With routing: llm-d it is a sidecar, which ends after the pod's gateway. */}}
{{- define "foretoken.verifierContainer" -}}
{{- $v := .Values -}}
{{- $isPool := eq $v.routing "llm-d" -}}
{{- $socket := "unix:/run/foretoken/verifier.sock" -}}
- name: verifier
  {{- include "foretoken.image" (dict "image" $v.images.engine "root" .) | nindent 2 }}
  {{- if $isPool }}
  restartPolicy: Always
  {{- end }}
  args:
    - verifier
    - {{ include "foretoken.modelPath" . }}
    - --served-model-name={{ $v.model.name }}
    - --address={{ ternary $socket "0.0.0.0:50052" $isPool }}
    - --drain-timeout={{ $v.drain.seconds }}
    {{- range $v.drafters }}
    {{- if eq .placement "in-process" }}
    - --drafter=name={{ .name }},algorithm={{ .algorithm }}{{ with .path }},model=/model/{{ . }}{{ end }}
    {{- else }}
    - --drafter=name={{ .name }},address=unix:/run/foretoken/{{ .name }}.sock
    {{- end }}
    {{- end }}
    {{- if eq $v.gpu.mode "none" }}
    - --device=cpu
    {{- else }}
    - --device=cuda
    {{- end }}
    {{- if $v.kvEvents.enabled }}
    - --kv-events=tcp://*:{{ $v.kvEvents.port }}
    - --kv-events-replay=tcp://*:{{ $v.kvEvents.replayPort }}
    - --kv-events-topic=kv@$(POD_IP):8000@{{ $v.model.name }}
    {{- end }}
    {{- if not $isPool }}
    {{- include "foretoken.linkArgs" . | nindent 4 }}
    {{- if $v.links.insecure }}
    - --insecure-links
    {{- end }}
    {{- end }}
    {{- with $v.verifier.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- if $v.gpu.mps }}
    - {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/mps/pipe}
    - {name: CUDA_MPS_LOG_DIRECTORY, value: /run/mps/log}
    {{- end }}
  ports:
    {{- if not $isPool }}
    - {name: verifier, containerPort: 50052}
    {{- end }}
    {{- if $v.kvEvents.enabled }}
    - {name: kv-events, containerPort: {{ $v.kvEvents.port }}}
    - {name: kv-replay, containerPort: {{ $v.kvEvents.replayPort }}}
    {{- end }}
  {{- $service := "foretoken.verifier.v1.VerifierService" }}
  {{- $start := div (add $v.verifier.startupSeconds 9) 10 }}
  {{- if or $isPool $v.links.certificateSecret }}
  # Kubernetes' gRPC probe opens no Unix socket and shows no certificate.
  {{- $address := ternary $socket "localhost:50052" $isPool }}
  startupProbe:
    exec: {command: {{ include "foretoken.probe" (dict "root" . "address" $address "service" $service) }}}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ $start }}
  livenessProbe:
    exec: {command: {{ include "foretoken.probe" (dict "root" . "address" $address "service" "") }}}
    periodSeconds: 30
    timeoutSeconds: 10
    failureThreshold: 3
  readinessProbe:
    exec: {command: {{ include "foretoken.probe" (dict "root" . "address" $address "service" $service) }}}
    periodSeconds: 10
    timeoutSeconds: 10
  {{- else }}
  startupProbe:
    grpc: {port: 50052, service: {{ $service }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ $start }}
  livenessProbe:
    grpc: {port: 50052}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    grpc: {port: 50052, service: {{ $service }}}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- end }}
  resources:
    {{- $resources := deepCopy $v.verifier.resources }}
    {{- if eq $v.gpu.mode "container" }}
    {{- $resources = mergeOverwrite $resources (dict "limits" (dict $v.gpu.resource 1)) }}
    {{- else if eq $v.gpu.mode "claim" }}
    {{- $resources = mergeOverwrite $resources (dict "claims" (list (dict "name" "gpu"))) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  {{- include "foretoken.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: sockets, mountPath: /run/foretoken}
    - {name: kernels, mountPath: /var/cache/foretoken, subPath: verifier}
    - {name: tmp, mountPath: /tmp}
    {{- if $v.gpu.mps }}
    {{- include "foretoken.mpsMounts" . | nindent 4 }}
    {{- end }}
    {{- if not $isPool }}
    {{- include "foretoken.linkMounts" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "foretoken.probe" -}}
{{- $words := list "foretoken" "probe" .address -}}
{{- if .service }}{{ $words = append $words (printf "--service=%s" .service) }}{{ end -}}
{{- if and (eq .root.Values.routing "gateways") .root.Values.links.certificateSecret -}}
{{- $words = concat $words (fromYamlArray (include "foretoken.certificateArgs" .root)) -}}
{{- end -}}
{{- toJson $words -}}
{{- end -}}

{{/* A drafter's container: a sidecar, so that it drafts until the verifier has drained. It has no probes for
readiness: without a drafter the same text is only slower. */}}
{{- define "foretoken.drafterContainer" -}}
{{- $v := .root.Values -}}
{{- $d := .drafter -}}
- name: drafter-{{ $d.name }}
  {{- include "foretoken.image" (dict "image" $v.images.engine "root" .root) | nindent 2 }}
  restartPolicy: Always
  args:
    - drafter
    - --address=unix:/run/foretoken/{{ $d.name }}.sock
    - --name={{ $d.name }}
    - --algorithm={{ $d.algorithm }}
    {{- with $d.path }}
    - --speculative-draft-model-path=/model/{{ . }}
    {{- end }}
    {{- if ne $d.algorithm "NGRAM" }}
    - --device={{ ternary "cpu" "cuda" (eq $v.gpu.mode "none") }}
    {{- end }}
    {{- with $d.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $usesGpu := and (eq $v.gpu.mode "claim") (ne $d.algorithm "NGRAM") }}
  {{- if and $usesGpu $v.gpu.mps }}
  {{- include "foretoken.mpsEnvironment" . | nindent 2 }}
  {{- end }}
  livenessProbe:
    exec: {command: [foretoken, probe, "unix:/run/foretoken/{{ $d.name }}.sock"]}
    initialDelaySeconds: 60
    periodSeconds: 30
    timeoutSeconds: 10
    failureThreshold: 3
  resources:
    {{- $resources := deepCopy ($d.resources | default dict) }}
    {{- if $usesGpu }}
    {{- $resources = mergeOverwrite $resources (dict "claims" (list (dict "name" "gpu"))) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  {{- include "foretoken.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: model, mountPath: /model, readOnly: true}
    - {name: sockets, mountPath: /run/foretoken}
    - {name: kernels, mountPath: /var/cache/foretoken, subPath: {{ $d.name }}}
    - {name: tmp, mountPath: /tmp}
    {{- if and $usesGpu $v.gpu.mps }}
    {{- include "foretoken.mpsMounts" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* NVIDIA's MPS daemon. Its clients run as the same user and share its folders. */}}
{{- define "foretoken.mpsContainer" -}}
- name: mps
  {{- include "foretoken.image" (dict "image" .Values.images.engine "root" .) | nindent 2 }}
  restartPolicy: Always
  command: [sh, -c, "mkdir -p /run/mps/pipe /run/mps/log && exec nvidia-cuda-mps-control -f"]
  {{- include "foretoken.mpsEnvironment" . | nindent 2 }}
  startupProbe:
    exec: {command: [sh, -c, "echo get_server_list | nvidia-cuda-mps-control"]}
    periodSeconds: 2
    failureThreshold: 30
  resources:
    claims: [{name: gpu}]
  {{- include "foretoken.containerSecurity" . | nindent 2 }}
  volumeMounts:
    {{- include "foretoken.mpsMounts" . | nindent 4 }}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
