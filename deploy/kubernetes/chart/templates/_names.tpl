{{- /* A new configuration is a new name, so that pods are replaced when it changes. */}}
{{- define "kvstow.configName" -}}
kvstow-config-{{ .Values.kvstow.config | sha256sum | trunc 10 }}
{{- end }}

{{- define "kvstow.ping" -}}
exec:
  command: [kvstow, ping, --target=unix:/run/kvstow/kvstow.sock, --timeout=2s]
{{- end }}

{{- define "kvstow.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
