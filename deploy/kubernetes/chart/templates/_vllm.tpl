{{- /* Takes the root and the worker's own values: dict "root" $ "worker" $worker. */}}
{{- define "kvstow.vllm" -}}
{{- $values := .root.Values -}}
{{- $extra := dict "target" "unix:/run/kvstow/kvstow.sock" "codec" $values.vllm.codec -}}
{{- $transfer := dict "kv_connector" "KvstowConnector"
      "kv_connector_module_path" "kvstow.vllm"
      "kv_role" $values.vllm.kvRole
      "kv_load_failure_policy" "recompute"
      "kv_connector_extra_config" $extra -}}
name: vllm
image: {{ $values.vllm.image }}
args:
  - --model={{ $values.model }}
  - --port=8000
  {{- with .worker.args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  - --kv-transfer-config
  - {{ $transfer | toJson | quote }}
env:
  - name: HOME
    value: /cache
  - name: USER
    value: vllm
ports:
  - name: http
    containerPort: 8000
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  failureThreshold: 180
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 4
lifecycle:
  preStop:
    exec:
      command: [sleep, "10"]
resources:
  {{- toYaml $values.vllm.resources | nindent 2 }}
securityContext:
  {{- include "kvstow.restricted" .root | nindent 2 }}
volumeMounts:
  - name: cache
    mountPath: /cache
  - name: tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
  - name: kvstow-socket
    mountPath: /run/kvstow
{{- end }}
