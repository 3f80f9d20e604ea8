{{- define "xidstream.labels" -}}
{{ include "xidstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "xidstream.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "xidstream.name" -}}
{{ printf "%s-xidstream" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "xidstream.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "xidstream.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* The TOML file of the run. The status page is for `kubectl port-forward`. */ -}}
{{- define "xidstream.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- include "xidstream.whole" $settings -}}
{{- $own := dict "status_address" "127.0.0.1:8275" -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $own "metrics_address" (printf "0.0.0.0:%d" (int .Values.metrics.port)) }}{{ end -}}
{{ merge $settings $own | toToml }}
{{- end }}

{{- /* Helm makes a float of each number, and toToml would write 16.0 for 16. */ -}}
{{- define "xidstream.whole" -}}
{{- range $name, $value := . -}}
{{- if kindIs "map" $value }}{{ include "xidstream.whole" $value }}
{{- else if and (kindIs "float64" $value) (eq (toString $value) (toString (floor $value))) }}{{ $_ := set $ $name (int64 $value) }}
{{- end }}
{{- end }}
{{- end }}
