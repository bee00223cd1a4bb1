{{- define "kvstow.sidecar" -}}
name: kvstow
image: {{ .Values.kvstow.image }}
restartPolicy: Always
args:
  - --config=/etc/kvstow/kvstowd.textproto
ports:
  - name: kvstow-metrics
    containerPort: 9400
startupProbe:
  {{- include "kvstow.ping" . | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 150
livenessProbe:
  {{- include "kvstow.ping" . | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources:
  {{- toYaml .Values.kvstow.resources | nindent 2 }}
securityContext:
  {{- include "kvstow.restricted" . | nindent 2 }}
volumeMounts:
  - name: kvstow-config
    mountPath: /etc/kvstow
    readOnly: true
  - name: kvstow-socket
    mountPath: /run/kvstow
  - name: kvstow-disk
    mountPath: /var/lib/kvstow
{{- end }}

{{- define "kvstow.volumes" -}}
- name: kvstow-config
  configMap:
    name: {{ include "kvstow.configName" . }}
- name: kvstow-socket
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: kvstow-disk
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .Values.kvstow.disk.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .Values.kvstow.disk.size }}
{{- end }}
