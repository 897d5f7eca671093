{{- define "foretoken.name" -}}
{{- printf "%s-foretoken" .Release.Name | replace "foretoken-foretoken" "foretoken" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "foretoken.selector" -}}
app.kubernetes.io/name: foretoken
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "foretoken.labels" -}}
{{ include "foretoken.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "foretoken.image" -}}
image: {{ printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) }}
imagePullPolicy: {{ .image.pullPolicy | default "IfNotPresent" }}
{{- end -}}

{{/* Refuse values that the services would refuse at their start, or that contradict each other. */}}
{{- define "foretoken.check" -}}
{{- $v := .Values -}}
{{- if not $v.model.name }}{{ fail "model.name: give the name of the model in requests" }}{{ end -}}
{{- if not $v.model.volume }}{{ fail "model.volume: give the volume that holds the checkpoint" }}{{ end -}}
{{- if not (or $v.access.keysSecret $v.access.insecure (and $v.access.tlsSecret $v.access.clientCertificates)) }}
{{- fail "access: other machines could use this server without a key; give access.keysSecret, client certificates, or access.insecure: true" }}
{{- end -}}
{{- if and $v.access.clientCertificates (not $v.access.tlsSecret) }}{{ fail "access.clientCertificates needs access.tlsSecret" }}{{ end -}}
{{- if eq $v.routing "gateways" -}}
{{- if not (or $v.links.tokenSecret $v.links.certificateSecret $v.links.insecure) }}
{{- fail "links: gateways and verifiers meet over TCP; give links.tokenSecret, links.certificateSecret, or links.insecure: true" }}
{{- end -}}
{{- else -}}
{{- if or $v.access.keysSecret $v.access.clientCertificates }}
{{- fail "access: with routing: llm-d the endpoint picker reads /metrics without a key; check clients at the router, and set access.insecure: true" }}
{{- end -}}
{{- if $v.access.tlsSecret }}{{ fail "access.tlsSecret: with routing: llm-d the router ends TLS" }}{{ end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.clients) }}
{{- fail "networkPolicy.clients: with routing: llm-d name the router's Envoy and endpoint picker, which alone may call the pods" }}
{{- end -}}
{{- if and $v.inferencePool.create (not $v.inferencePool.endpointPicker.name) }}
{{- fail "inferencePool.endpointPicker.name: give the Service of the endpoint picker" }}
{{- end -}}
{{- end -}}
{{- if and $v.gpu.mps (ne $v.gpu.mode "claim") }}{{ fail "gpu.mps: only drafters in containers share a GPU by MPS: set gpu.mode: claim" }}{{ end -}}
{{- range $v.drafters -}}
{{- if and (eq $v.gpu.mode "container") (eq .placement "container") (ne .algorithm "NGRAM") }}
{{- fail (printf "drafters: %s has a model, and one container holds the GPU: set its placement: in-process, or gpu.mode: claim" .name) }}
{{- end -}}
{{- if and (eq .placement "in-process") (or .args .resources) }}
{{- fail (printf "drafters: %s runs in the verifier, whose args and resources it has" .name) }}
{{- end -}}
{{- end -}}
{{- end -}}
