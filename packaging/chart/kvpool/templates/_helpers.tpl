{{/* Labels by which services and the DaemonSet find their pods. */}}
{{- define "kvpool.selector" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "kvpool.labels" -}}
{{ include "kvpool.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "-" | quote }}
{{- end }}

{{/* A tag has no `+`, which versions between releases have. */}}
{{- define "kvpool.tag" -}}
{{ .Values.image.tag | default (.Chart.AppVersion | replace "+" "-") }}
{{- end }}

{{- define "kvpool.image" -}}
{{ .Values.image.repository }}:{{ include "kvpool.tag" . }}
{{- end }}

{{/* kvpool.toml: what the chart sets, over `config`, over what a fleet has by default. JSON's strings, numbers and booleans are TOML's. */}}
{{- define "kvpool.toml" -}}
{{- $own := dict "server" (dict "socket" (printf "%s/kvpool.sock" .Values.runPath) "metrics_socket" (printf "%s/metrics.sock" .Values.runPath)) }}
{{- if .Values.metrics.enabled }}
{{- $_ := set $own.server "metrics" "127.0.0.1:9469" }}
{{- end }}
{{- if .Values.ssdPath }}
{{- $_ := set $own "ssd" (dict "path" "/data/kvpool") }}
{{- end }}
{{- $fleet := dict }}
{{- if .Values.peer.enabled }}
{{- $members := printf "dns:%s-peers.%s.svc:%v" .Release.Name .Release.Namespace .Values.peer.port }}
{{- $_ := set $fleet "peer" (dict "members" $members "keys" "/secrets/node.key" "allow" "/secrets/nodes.allow") }}
{{- end }}
{{- range $section, $options := mergeOverwrite $fleet (deepCopy .Values.config) $own }}
[{{ $section }}]
{{- range $name, $value := $options }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end }}
